"""Files and settings of other frameworks."""
