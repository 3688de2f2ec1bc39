# MPI for the layer parallel_mpi. Without it SWITCHYARD_WITH_MPI=AUTO becomes OFF and ON is an error.
#
# The C interface only: Debian's C++ one adds a library that Open MPI 5 does not have.
# SWITCHYARD_MPIEXEC_FLAGS is what mpirun needs to start more ranks than there are cores,
# SWITCHYARD_MPIEXEC_RECOVERY_FLAGS what makes it leave the others alone when a rank dies; empty if it cannot.
if(NOT SWITCHYARD_WITH_MPI STREQUAL "OFF")
  unset(ENV{I_MPI_ROOT})  # FindMPI would take Intel's libraries for any compiler
  find_package(MPI 3.1 QUIET COMPONENTS C)
  if(NOT MPI_C_FOUND)
    if(SWITCHYARD_WITH_MPI STREQUAL "ON")
      message(FATAL_ERROR "SWITCHYARD_WITH_MPI=ON: no MPI 3.1 was found. Install libopenmpi-dev and openmpi-bin "
        "(tools/setup test), or set MPI_C_COMPILER to an MPI compiler.")
    endif()
    message(STATUS "MPI: off, because no MPI 3.1 was found (Debian: libopenmpi-dev openmpi-bin)")
    set(SWITCHYARD_WITH_MPI OFF)
  endif()
endif()

if(NOT SWITCHYARD_WITH_MPI STREQUAL "OFF")
  set(SWITCHYARD_MPIEXEC_FLAGS "")
  set(SWITCHYARD_MPIEXEC_RECOVERY_FLAGS "")
  if(MPIEXEC_EXECUTABLE)
    execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE _sy_mpiexec ERROR_QUIET)
    if(_sy_mpiexec MATCHES "\\(Open(RTE| MPI)\\) ([0-9]+)")
      # Binding would put the first ranks of all tests that run at once on the same cores.
      if(CMAKE_MATCH_2 LESS 5)
        set(SWITCHYARD_MPIEXEC_FLAGS --oversubscribe --bind-to none)
        set(SWITCHYARD_MPIEXEC_RECOVERY_FLAGS --enable-recovery)
      else()
        set(SWITCHYARD_MPIEXEC_FLAGS --map-by :OVERSUBSCRIBE --bind-to none)
        set(SWITCHYARD_MPIEXEC_RECOVERY_FLAGS --with-ft ulfm)
      endif()
    endif()
  endif()
  message(STATUS "MPI: ${MPI_C_LIBRARIES}, started with ${MPIEXEC_EXECUTABLE} ${SWITCHYARD_MPIEXEC_FLAGS}")
endif()
