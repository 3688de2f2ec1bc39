# cmake -DMPIRUN=... -DPROGRAM=... -P run_mpi_test.cmake: what three ranks end with when one of them misbehaves.
function(expect mode status)
  execute_process(COMMAND ${MPIRUN} -n 3 ${PROGRAM} ${mode} TIMEOUT 60
    RESULT_VARIABLE found OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT found EQUAL status)
    message(FATAL_ERROR "${mode}: expected status ${status}, found ${found}\n${output}")
  endif()
  foreach(text IN LISTS ARGN)
    if(NOT output MATCHES "${text}")
      message(FATAL_ERROR "${mode}: expected \"${text}\" in\n${output}")
    endif()
  endforeach()
  message("${mode}: as expected")
endfunction()

expect(fine 0 "rank 0 ends with status 0" "rank 1 ends with status 0" "rank 2 ends with status 0")
expect(throw 1 "rank 1 reports: expert 7 has no weights"
  "rank 0 reports: [^\n]*rank 1 of group \"world\" failed: expert 7 has no weights"
  "rank 2 reports: [^\n]*rank 1 of group \"world\" failed: expert 7 has no weights")
# A rank that is late, or has ended: the others say where they waited, and for whom.
foreach(mode late leave)
  expect(${mode} 1 "group \"ep\": Barrier .layer 3 dispatch.: after 500 ms, still waiting for rank 1")
endforeach()
