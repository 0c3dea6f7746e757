"""The operators: every class of these modules that is a whole operator is one, whatever module it stands in."""
