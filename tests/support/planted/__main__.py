"""List each planted fault, and the names that it replaces."""

from . import AREAS, faults, replaced_by

for area in AREAS:
    print(area)
    for fault in faults(area):
        print(f"  {fault.__name__}: {', '.join(replaced_by(fault))}")
