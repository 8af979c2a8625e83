"""Callbacks for the trainers of other libraries. Each module needs its library, and imports no other one."""
