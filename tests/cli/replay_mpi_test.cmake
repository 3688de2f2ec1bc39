# cmake -DMPIRUN=... -DRANKS=n -DPROGRAM=... -DCASES=... -P replay_mpi_test.cmake: what `switchyard replay` says when mpirun
# starts it: the lines of one program, whose ranks agree.
file(GLOB_RECURSE files ${CASES}/*.safetensors)
list(LENGTH files num_cases)

# Runs with the options ARGN; sets `found` and `output`.
macro(replay)
  execute_process(COMMAND ${MPIRUN} -n ${RANKS} ${PROGRAM} replay ${ARGN} TIMEOUT 60
    RESULT_VARIABLE found OUTPUT_VARIABLE output ERROR_VARIABLE output)
endmacro()

function(expect status text count)
  if(status EQUAL 0 AND NOT found EQUAL 0 OR NOT status EQUAL 0 AND found EQUAL 0)
    message(FATAL_ERROR "${ARGN}: expected status ${status}, found ${found}\n${output}")
  endif()
  string(REGEX MATCHALL "${text}" matches "${output}")
  list(LENGTH matches times)
  if(NOT times EQUAL count)
    message(FATAL_ERROR "${ARGN}: expected \"${text}\" ${count} times, found it ${times} times in\n${output}")
  endif()
endfunction()

foreach(options "" "--dp-attention" "--runner;reference" "--runner;ascend" "--act-dtype;bf16"
    "--a2a;deepep;--deepep-mode;normal" "--a2a;deepep;--deepep-mode;low_latency" "--a2a;deepep;--runner;ascend;--dp-attention"
    "--a2a;deepep;--ep-push-rows;0;--ep-summed-combine" "--a2a;mooncake" "--a2a;nixl" "--a2a;mori" "--a2a;mori;--dp-attention"
    "--a2a;ascend_fuseep" "--a2a;ascend_fuseep;--dp-attention")
  replay(${CASES} ${options})
  expect(0 "${num_cases} cases: [0-9]+ passed, 0 failed" 1 "${options}")
  expect(0 "layer/act-step2 +PASS" 1 "${options}")
  expect(0 "dispatch/ll-skipped +PASS" 1 "${options}")
endforeach()

# The dispatchers ran over the ranks, and no case is skipped if nothing is asked for.
replay(${CASES} --json)
expect(0 "\"passed\":${num_cases}," 1 "json")
expect(0 "\"failed\":0," 1 "json")
expect(0 "out.recv_per_expert .mori, 2 ranks .mpi.." 1 "json")

# One rank speaks, and all end with its status.
replay(no/such/case)
expect(1 "no/such/case: there is no such file" 1 "no case")
replay(${CASES}/layer/046-no-combine-bias-bf16.safetensors --a2a deepep)
expect(1 "nothing was compared: the case was skipped" 1 "all skipped")
