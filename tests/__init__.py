"""Tests of Virial. One folder a level: see CONTRIBUTING.md."""
