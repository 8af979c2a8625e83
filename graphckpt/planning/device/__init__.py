"""Descriptions of devices, and stand-ins for devices that are absent."""
