"""Tests of islands: workers that are jobs of their own."""
