// Inside the page, before its first paint: what that needs, and then the rest of the scripts. A frame comes first, so that
// they do not hold it up; a tab that nobody sees has no frames. Asked for twice, a module is still loaded once.
const begin = () => import("./page/app.js");
requestAnimationFrame(() => setTimeout(begin));
setTimeout(begin, 300);
document.documentElement.dataset.theme = localStorage.getItem("torchtpu.theme") ?? "";
