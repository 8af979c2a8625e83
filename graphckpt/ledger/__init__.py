"""What a step keeps: the record, the table and the picture."""
