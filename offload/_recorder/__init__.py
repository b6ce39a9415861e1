"""The flight recorder: what pipelines and engines decided in the last minutes, in a ring of bounded size.

``records`` is what is written down, ``layout`` how a ring is laid out, ``ring`` the memory or file itself. ``flight`` observes
pipelines and engines, and ``allowance`` is what that may cost. ``recording`` is what comes out of a ring, sound or damaged,
``stories`` what became of each container in it, ``show`` its text, and ``command`` is ``offload incident``. A scenario is made
of a recording by :mod:`offload.testing.scenarios._incident`.
"""
