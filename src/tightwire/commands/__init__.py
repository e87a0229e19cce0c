"""The commands of `tightwire`. A module is imported when one of its commands is named."""
