"""Checks of the library's promises that a user runs: of a training step (``verify``), of a device (``selftest``)."""
