# Builds cann/ beside _native where CANN is, as HP_KERNELS_CANN=auto|on|off in the environment says (auto).
# hp_kernels/cann.py decides, and names what is missing and the command that mends it.
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/src/hp_kernels/cann.py"
  OUTPUT_VARIABLE HP_CANN_DECISION OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_VARIABLE HP_CANN_PROBLEMS RESULT_VARIABLE HP_CANN_STATUS)
if(NOT HP_CANN_STATUS EQUAL 0)
  message(FATAL_ERROR "${HP_CANN_PROBLEMS}")
endif()
message(STATUS "CANN kernels: ${HP_CANN_DECISION}")
if(HP_CANN_DECISION STREQUAL "build")
  include(ExternalProject)
  ExternalProject_Add(
    hp_kernels_cann
    SOURCE_DIR "${CMAKE_CURRENT_SOURCE_DIR}/cann"
    CMAKE_ARGS -DCMAKE_BUILD_TYPE=Release "-DCMAKE_INSTALL_PREFIX=${CMAKE_CURRENT_BINARY_DIR}/cann-installed")
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/cann-installed/libhp_kernels_cann.so" DESTINATION . COMPONENT native)
endif()
