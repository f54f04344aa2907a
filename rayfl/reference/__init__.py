"""Reference of the configuration files, generated from the classes that validate them."""
