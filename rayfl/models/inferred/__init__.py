"""Networks of any library and of the user's own, whose axes are inferred."""
