"""Devices, the launcher's variables, and the choice of a transport."""
