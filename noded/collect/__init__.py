"""What a host has and how it is: inventory and readings, read from sysfs and procfs. One module a source."""
