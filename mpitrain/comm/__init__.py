"""Messages between ranks: one door (`Communicator`) over exchangeable means of transport.

    world()  ->  World                    the ranks around this one: MPI's, threads of one process, or itself alone
    Mesh(world, pp=2, dp=2, tp=2)         one Communicator an axis: .pp .edp .ep .cp .tp, and the merges
    LocalWorld(8).run(main)               eight ranks as threads of this process, no MPI needed

Read in this order: transport.py (what moves bytes), communicator.py (the door), mesh.py, then local.py or mpi.py;
checked.py, if you want to know how ranks that differ are found.
"""
