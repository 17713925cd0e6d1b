"""Recipes, commands and configs as people bring them, end to end through the command line."""
