// Sets the chosen theme before the first paint; a module would run after it.
document.documentElement.dataset.theme = localStorage.getItem("torchtpu.theme") ?? "";
