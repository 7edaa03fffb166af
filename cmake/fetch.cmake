# Tools and headers from the package index, by exact version and hash, into the build folder.

# Runs pip; `failure` says why it could not, or is empty. Within pip's isolated build PYTHONPATH hides
# the pip of the Python that builds.
function(forge_pip failure)
  set(pythons ${Python_EXECUTABLE} ${PYTHON_EXECUTABLE} python3)
  list(REMOVE_DUPLICATES pythons)
  set(said "")
  foreach(python IN LISTS pythons)
    execute_process(
      COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH ${python} -m pip
        --disable-pip-version-check --quiet ${ARGN}
      RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
    if(result EQUAL 0)
      set(${failure} "" PARENT_SCOPE)
      return()
    endif()
    string(APPEND said "\n${python} -m pip: ${text}")
  endforeach()
  set(${failure} "${said}" PARENT_SCOPE)
endfunction()

# Where a file of an installed distribution lies, or empty: forge_installed_file(var mlx-metal x/y.h)
function(forge_installed_file variable distribution file)
  set(${variable} "" PARENT_SCOPE)
  set(script "
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
try:
    found = [str(Path(f.locate())) for f in files('${distribution}') or () if f.as_posix() == '${file}']
except PackageNotFoundError:
    found = []
print(*found[:1], end='')")
  if(Python_EXECUTABLE)
    set(python ${Python_EXECUTABLE})
  elseif(PYTHON_EXECUTABLE)
    set(python ${PYTHON_EXECUTABLE})
  else()
    set(python python3)
  endif()
  execute_process(COMMAND ${python} -c "${script}"
    RESULT_VARIABLE result OUTPUT_VARIABLE path ERROR_QUIET)
  if(result EQUAL 0 AND EXISTS "${path}")
    set(${variable} ${path} PARENT_SCOPE)
  endif()
endfunction()
