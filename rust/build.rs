//! Asks the Python that will import the module for its PyTorch, and compiles the ATen shim against it.
//!
//! `PYO3_PYTHON` names the interpreter (maturin sets it); without it the `python3` on the path is
//! asked. The versions found here become `torchtpu_rs.BUILD`.

use std::path::PathBuf;
use std::process::Command;

/// Prints one `key=value` a line. Without torch it prints why, and how to go on.
const ASK_PYTHON: &str = r#"
import os, platform, sys, sysconfig
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # no search for a TPU while building
try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(f"{sys.executable} cannot import torch ({error}); install PyTorch there, and build "
             "without isolation: pip install --no-build-isolation .")
print(f"torch={torch.__version__}")
print(f"python={platform.python_version()}")
print(f"cxx11_abi={int(torch.compiled_with_cxx11_abi())}")
for folder in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]:
    print(f"include={folder}")
for folder in cpp_extension.library_paths():
    print(f"library={folder}")
"#;

fn main() {
    println!("cargo:rerun-if-env-changed=PYO3_PYTHON");
    println!("cargo:rerun-if-env-changed=VIRTUAL_ENV");
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-changed=build.rs");

    let python = interpreter();
    let answers = ask(&python);
    let all = |key: &str| -> Vec<&str> {
        answers.iter().filter(|(k, _)| k == key).map(|(_, value)| value.as_str()).collect()
    };
    let one = |key: &str| *all(key).first().unwrap_or_else(|| fail(&format!("no `{key}`")));

    println!("cargo:rustc-env=TORCHTPU_BUILD_TORCH={}", one("torch"));
    println!("cargo:rustc-env=TORCHTPU_BUILD_PYTHON={}", one("python"));
    println!("cargo:rustc-env=TORCHTPU_BUILD_RUSTC={}", rustc_version());

    let with_python = std::env::var_os("CARGO_FEATURE_PYTHON").is_some();
    let mut shim = cc::Build::new();
    shim.cpp(true).std("c++20").opt_level(2).warnings(true).extra_warnings(true);
    shim.flag("-Werror").define("_GLIBCXX_USE_CXX11_ABI", one("cxx11_abi"));
    for folder in all("include") {
        shim.flag("-isystem").flag(folder);
    }
    shim.file("shim/aten.cpp");
    if with_python {
        shim.file("shim/python.cpp");
    }
    shim.compile("aten_shim");

    for folder in all("library") {
        println!("cargo:rustc-link-search=native={folder}");
    }
    // No rpath: `import torch` has loaded these libraries before the module asks for them by name.
    for library in ["torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
    if with_python {
        println!("cargo:rustc-link-lib=dylib=torch_python");
    }
    // libtorch_cpu's own dependencies (CUDA wheels) are found at run time, not at link time.
    println!("cargo:rustc-link-arg=-Wl,--allow-shlib-undefined");
}

fn interpreter() -> PathBuf {
    if let Some(named) = std::env::var_os("PYO3_PYTHON") {
        return named.into();
    }
    match std::env::var_os("VIRTUAL_ENV") {
        Some(environment) => PathBuf::from(environment).join("bin/python"),
        None => "python3".into(),
    }
}

fn ask(python: &PathBuf) -> Vec<(String, String)> {
    let output = Command::new(python)
        .args(["-c", ASK_PYTHON])
        .output()
        .unwrap_or_else(|error| fail(&format!("cannot run {}: {error}", python.display())));
    if !output.status.success() {
        fail(String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

fn rustc_version() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    match Command::new(rustc).arg("--version").output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        Err(error) => fail(&format!("cannot ask rustc for its version: {error}")),
    }
}

fn fail(why: &str) -> ! {
    println!("cargo:warning={why}");
    std::process::exit(1);
}
