"""Compares configurations of a training: batch sizes, policies of a model that is named, and layouts over ranks."""
