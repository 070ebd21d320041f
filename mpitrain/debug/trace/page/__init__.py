"""A trace as one HTML page that needs nothing else: the timeline of all ranks, their messages, memory and losses.

html      what is written: the page, its style, its program and its data in one file
choice    which spans of a long trace
contents  what the page holds of them, as columns
columns   columns of numbers as few characters
plain     names and numbers from files, made fit to be shown

`page.html`, `page.css` and the files of `js` are the page's own sources, put into the file as they stand: there is no
framework and no build.  The program's parts are one script, in the order of `html.PROGRAM`.
"""
