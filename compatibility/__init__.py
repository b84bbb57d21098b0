"""What ToMA is tried with, feature by feature, and the page that tells of it.

    kit       the small real models, and ComfyUI's nodes by name
    parallel  how packs share a model among several cards, re-created
    rows      one function per feature: how it is put into a graph
    judge     the one judgement of all rows
    page      the table in docs/compatibility.md

tests/compatibility runs every row; `make compatibility` also writes the page.
"""
