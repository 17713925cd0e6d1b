"""DeepSpeed's rules, one file per wrapper class."""
