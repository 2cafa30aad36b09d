"""DTensor as a compiler: it expands a function for a mesh, and ordinary TensorFlow runs the result.

`lowering` has DTensor expand a traced function on a mesh without devices, which runs nothing.
`stitching` copies the program that each device would run onto all devices of a slice, in one
function; `collectives` says what each collective of it becomes there.
"""
