"""The flight recorder: a bounded ring of pipelines' and engines' recent decisions.

``records`` are the records, ``layout`` is the layout of a ring, ``ring`` its memory or file. ``flight`` observes
pipelines and engines, and ``allowance`` limits its cost. ``recording`` reads a ring, sound or damaged,
``stories`` traces each container in it, ``show`` prints it, and ``command`` is ``offload incident``. A scenario is made
of a recording by :mod:`offload.testing.scenarios._incident`.
"""
