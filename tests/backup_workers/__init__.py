"""Tests of steps that do not wait for late workers."""
