"""Values of the script in protected host state: the attributes, and whose they are."""
