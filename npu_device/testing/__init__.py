"""Tools with which users test their own scripts on their own machines."""
