"""Yardsticks that the product is measured against. Not shipped."""
