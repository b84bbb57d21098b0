"""The compatibility matrix, feature by feature, and the page with its results.

    kit       small real models, and ComfyUI's nodes by name
    parallel  a reimplementation of how packs share a model among several cards
    rows      one function for each feature, which makes the feature's graphs
    judge     the checks that every row passes
    page      the tables in docs/compatibility.md

tests/compatibility runs every row. `make compatibility` also writes the page.
"""
