"""The memory of a step under any plan, from traces. Integers only."""
