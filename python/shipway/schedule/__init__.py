"""Schedules for compilers that leave them to us."""
