// Shows what the node tells, as it comes. The token comes in the fragment and is kept for this tab.
if (location.hash.length > 1) {
  sessionStorage.setItem("token", location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
}
const headers = { Authorization: `Bearer ${sessionStorage.getItem("token")}` };
const shown = document.getElementById("view");

async function follow(node) {
  const answer = await fetch(`/api/nodes/${node}/live`, { headers });
  if (!answer.ok) {
    shown.textContent = (await answer.json()).error.message;
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const [kind, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      if (kind === "view") shown.textContent = JSON.stringify(JSON.parse(data), null, 1);
    }
  }
}

follow(0);
