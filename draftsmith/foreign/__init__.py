"""The one boundary where foreign bytes become our values: files that users, other tools and other machines wrote."""
