"""A folder with texts and a config, for the tests of training runs."""

from helpers.small_run import place

__all__ = ["place"]
