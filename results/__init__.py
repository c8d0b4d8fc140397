"""Measuring a run, records on disk, statistics, tables."""
