"""Devices, placement, clock, environment. Knows nobody else in specbench."""
