"""Two or more runs side by side, from their result files. No torch, no engine.

runs.py         find a run by id, unique prefix or folder; read what it left
differences.py  settings, code, versions and hardware that are not the same everywhere
tests.py        curves in numbers, and paired tests on the evaluations
figures.py      reward and gap against the step
page.py         the Markdown page
"""
