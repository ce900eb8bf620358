"""Support for other libraries, one file each."""
