"""Search for the static draft tree that suits a head and a machine."""
