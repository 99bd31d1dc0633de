"""`tg.map` and `tg.imap`: a function, its pieces, and nodes that compute each piece once.

A map is an elastic job of this package. Its workers deal the pieces among themselves (`elastic_jobs.dealing`); what
they share with the caller is a folder of files:

    caller ──pieces──► folder ──► workers ──results, errors──► files of their own ──► caller

Each worker writes the result of a piece before the piece counts. So once the job has ended, the files have all
results; after a crash they have those to go on from. The first result of a piece is the one that the caller gets.

    functions   the name of the function, by which nodes import it
    records     values in files: the pieces; results and errors, one after the other
    journal     the folder of a map, by its name; what it has of an earlier run
    job         what the workers run
    mapping     what the caller runs: the job in a thread, its results as they come
    showing     one line of progress on a terminal

It does not know how nodes are started, or how pieces are dealt.
"""
