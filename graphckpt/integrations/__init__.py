"""Callbacks for the trainers of other libraries, and pipelines. Each module imports only its library."""
