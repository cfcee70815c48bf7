"""A report on a run, made from its run directory alone: as one HTML file, or in a terminal.

:mod:`~elastictrain.reports.facts` reads and computes what there is to tell; :mod:`~elastictrain.reports.page` and
:mod:`~elastictrain.reports.terminal` say it. Nothing here imports torch, and nothing writes to the run directory.
"""
