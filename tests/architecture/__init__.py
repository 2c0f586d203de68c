"""The walls of the house, kept by machine. Each check is also shown to catch a violation."""
