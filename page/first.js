// Inside the page. The rest comes after the first frame, which a tab that nobody sees has not; loaded twice it runs once.
const begin = () => import("./page/app.js");
requestAnimationFrame(() => setTimeout(begin));
setTimeout(begin, 300);
document.documentElement.dataset.theme = localStorage.getItem("torchtpu.theme") ?? "";
