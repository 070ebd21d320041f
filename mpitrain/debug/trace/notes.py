"""What the tracer notes, one tuple each; the first part says which of these it is.

ROW        with ops                         a row of actions begins
BEGIN      when, name, path                 an op, or a unit that comes
OP         when, name, shape, dtype         its end
MESSAGE    begin, end, seen, what, number   seen: its site and path, None where nobody looked; what: name, axis,
                                            peer, tag, shape, dtype, bytes
ARRIVAL    when, what, number               what: name, axis, peer, tag
UNIT       when, name, path, bytes          the end of a fetch; or a release, which has no begin
FILE       begin, end, kind, name, path, bytes, depth    of the disk, or a copy of a store
ACTION     begin, end, action, step         all since the one before, or since the row's begin, was in it
HELD       when, step, bytes by owner
ROW_ENDS   (loss, targets) of its steps
"""

ROW, BEGIN, OP, MESSAGE, ARRIVAL, UNIT, FILE, ACTION, HELD, ROW_ENDS = range(10)
