"""The language of export layouts and engines, and how a head's folder is recognised."""
