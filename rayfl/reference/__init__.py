"""The reference of an experiment file: settings and choices, as the classes that check a file define them."""
