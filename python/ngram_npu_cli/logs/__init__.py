"""Reads recorded conversations from logs of many formats."""
