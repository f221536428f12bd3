"""Exact acceptance from one teacher-forced pass."""
