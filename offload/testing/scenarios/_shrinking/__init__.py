"""A program that goes wrong, made small."""
